import './styles/tokens.css';
import './styles/base.css';
import './styles/shell.css';
import './styles/conversation.css';
import './styles/composer.css';
import './styles/overlays.css';
import './styles/narrow.css';
import { mount } from 'svelte';
import App from './App.svelte';

mount(App, { target: document.getElementById('app')! });
